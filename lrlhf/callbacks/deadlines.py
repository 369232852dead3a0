"""How long each phase of a run may take."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lrlhf.run.supervision.phase_deadlines import Limits, SetsDeadlines

_DEFAULT = Limits()


class Deadlines(L.Callback, SetsDeadlines):
    """Gives the phases of a run other deadlines than they have without it.

    Every run has deadlines; this callback changes them. A phase that takes longer at a stretch ends
    the run with exit status 1: the message names phase, iteration and rank, and where every thread
    of the process was stands in ``stacks_rank<rank>.txt``. Time in which the process is stopped or
    the machine sleeps does not count, and a clock that is set has no effect. All values are
    seconds; null means none.

    Args:
        setup: From the start of fit to the first batch, with the models that the module loads.
        load: Reading a checkpoint.
        data: Waiting for one batch.
        sync: Bringing an engine its weights.
        generate: Drawing the responses of an iteration, or of a batch of a validation.
        reward: Scoring them.
        logprob: Log-probabilities and values of an iteration.
        update: The optimizer steps of an iteration.
        train: The rest of a training step; all of it where a module has no phases.
        validation: A batch of a validation, without its responses and rewards.
        save: Writing a checkpoint.
        end: After the last batch: exports and reports.
        grace: From the error to the end of the process by force, where the error does not end it.
        dirpath: Folder of the stacks; None: the logger's, else the trainer's root.
    """

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        setup: float | None = _DEFAULT.setup,
        load: float | None = _DEFAULT.load,
        data: float | None = _DEFAULT.data,
        sync: float | None = _DEFAULT.sync,
        generate: float | None = _DEFAULT.generate,
        reward: float | None = _DEFAULT.reward,
        logprob: float | None = _DEFAULT.logprob,
        update: float | None = _DEFAULT.update,
        train: float | None = _DEFAULT.train,
        validation: float | None = _DEFAULT.validation,
        save: float | None = _DEFAULT.save,
        end: float | None = _DEFAULT.end,
        grace: float = _DEFAULT.grace,
        dirpath: str | Path | None = None,
    ) -> None:
        self._limits = Limits(
            setup=setup,
            load=load,
            data=data,
            sync=sync,
            generate=generate,
            reward=reward,
            logprob=logprob,
            update=update,
            train=train,
            validation=validation,
            save=save,
            end=end,
            grace=grace,
        )
        self._folder = None if dirpath is None else Path(dirpath)

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def stacks_folder(self) -> Path | None:
        return self._folder
