"""Draft heads. HEADS is the only table: kind -> (head class, its settings dataclass)."""

from heads.block import Block, BlockConfig
from heads.eagle1 import Eagle1, Eagle1Config
from heads.eagle3 import Eagle3, Eagle3Config
from heads.medusa import Medusa, MedusaConfig
from heads.mtp import Mtp, MtpConfig
from heads.recurrent import Lstm, LstmConfig, Mlp, MlpConfig

HEADS = {
    "medusa": (Medusa, MedusaConfig),
    "eagle1": (Eagle1, Eagle1Config),
    "eagle3": (Eagle3, Eagle3Config),
    "mtp": (Mtp, MtpConfig),
    "mlp": (Mlp, MlpConfig),
    "lstm": (Lstm, LstmConfig),
    "block": (Block, BlockConfig),
}
