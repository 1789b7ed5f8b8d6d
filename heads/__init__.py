"""Draft heads. HEADS is the only table: kind -> (head class, its settings dataclass)."""

from heads.eagle3 import Eagle3, Eagle3Config
from heads.medusa import Medusa, MedusaConfig

HEADS = {"medusa": (Medusa, MedusaConfig), "eagle3": (Eagle3, Eagle3Config)}
