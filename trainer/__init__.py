"""The run: launcher, `RLTrainer`, records. `RLTrainer` is loaded when it is first asked for, since it brings torch and Megatron."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tridentrl.trainer.rl_trainer import RLTrainer

__all__ = ["RLTrainer"]


def __getattr__(name: str) -> Any:
    if name == "RLTrainer":
        from tridentrl.trainer.rl_trainer import RLTrainer

        return RLTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
