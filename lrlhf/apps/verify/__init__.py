"""Verification of the rollouts of any trainer against the weights that may have sampled them."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.apps.verify.verification import Settings, Verification, verify
    from lrlhf.apps.verify.verify_rollouts import VerifyRollouts
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["Settings", "Verification", "VerifyRollouts", "verify"]
