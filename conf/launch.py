"""Starts `python -m train` again as several processes under `accelerate launch`, from a `launcher` config.

`python -m train launcher=cpu2` and `accelerate launch --multi_gpu --num_processes 2 -m train launcher=cpu2` do the
same. The flags were tried in accelerate 1.15: `--cpu --num_processes 2` starts one process; `--multi_gpu
--num_processes 2` with `Accelerator(cpu=True)` starts two that talk over gloo, on machines without a GPU too.
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

# `accelerate launch` sets the last even for one process, torchrun and Slurm's wrappers the others.
LAUNCHED_BY = ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_DYNAMO_BACKEND")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MIXED_PRECISION = ("no", "fp16", "bf16", "fp8")


@dataclass
class LauncherSettings:
    """How many processes train, in the words of `accelerate launch`. `num_processes` null: one for each visible GPU."""

    num_processes: int | None = 1
    cpu: bool = False
    multi_gpu: bool = False
    mixed_precision: str = "no"
    extra: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"launcher.num_processes={self.num_processes}: at least 1, or null for one on each GPU")
        if self.mixed_precision not in MIXED_PRECISION:
            known = ", ".join(MIXED_PRECISION)
            raise ValueError(f"launcher.mixed_precision={self.mixed_precision!r}: use one of {known}")
        if self.num_processes is not None and self.num_processes > 1 and not self.multi_gpu:
            raise ValueError(
                f"launcher.num_processes={self.num_processes} needs launcher.multi_gpu=true:"
                " without it accelerate starts one process"
            )


def launch_command(settings: LauncherSettings, processes: int, module: str, overrides: list[str]) -> list[str]:
    """The command line, with every flag that accelerate would otherwise warn about."""
    # Port 0 takes a free one: two runs on one machine do not meet.
    flags = ["--num_processes", str(processes), "--num_machines", "1"]
    flags += ["--mixed_precision", settings.mixed_precision, "--dynamo_backend", "no", "--main_process_port", "0"]
    if settings.multi_gpu:
        flags.append("--multi_gpu")
    # `extra` comes last, so that it can say otherwise (--num_machines, --machine_rank, --config_file ...).
    return [sys.executable, "-m", "accelerate.commands.launch", *flags, *settings.extra, "-m", module, *overrides]


def processes_to_start(settings: LauncherSettings) -> int:
    """How many processes a relaunch would start; 1 where this process is one of them already, or alone is enough."""
    if any(name in os.environ for name in LAUNCHED_BY):
        return 1
    return settings.num_processes or _visible_gpus()


def relaunch_if_needed(settings: LauncherSettings, module: str) -> int | None:
    """Run `module` with this command's overrides under `accelerate launch` and return its exit status.

    None when this process should do the work itself: one process is asked for, or it was launched already.
    SIGTERM, SIGINT and SIGHUP are passed on, so that the ranks save and exit by themselves.
    """
    processes = processes_to_start(settings)
    if processes <= 1:
        return None
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    command = launch_command(settings, processes, module, own_overrides())
    # A session of its own: Ctrl-C then reaches the ranks once, passed on from here, not twice.
    child = subprocess.Popen(command, env=environment, start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def own_overrides() -> list[str]:
    """What the ranks need on their command line to compose the configuration of this process."""
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return sys.argv[1:]
    # Inside a sweep sys.argv holds the whole sweep; this job's own choices are in the config.
    name = Path(config.runtime.output_dir).name
    own = [override for override in config.overrides.task if not override.startswith("name=")]
    return [*own, f"name={name}"]


def _visible_gpus() -> int:
    # Imported late: a relaunch that names its number of processes does not wait for torch.
    import torch

    return torch.cuda.device_count()
