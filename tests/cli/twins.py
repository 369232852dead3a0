"""A class whose name another module uses too."""

import lightning as L


class ToyTwin(L.LightningModule):
    """The other of two."""
