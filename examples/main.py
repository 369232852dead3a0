"""Lightning's own command line: ``python main.py fit --config main.yaml``."""

from lightning.pytorch.cli import LightningCLI

from lrlhf import Trainer
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO
from lrlhf.options.parser import Parser

if __name__ == "__main__":
    LightningCLI(
        RLOO,
        PromptDataModule,
        trainer_class=Trainer,
        parser_class=Parser,  # names the nearest option where one is misspelt
        auto_configure_optimizers=False,  # the module has an option of its own
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},  # a second run in the same folder
    )
