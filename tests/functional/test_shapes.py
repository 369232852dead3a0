"""The annotations are the contract, so the tests must run with them checked."""

import jaxtyping
import pytest
import torch

from lrlhf.functional import bradley_terry_loss, masking


@pytest.fixture
def _checked() -> None:
    if not type(masking.__spec__.loader).__module__.startswith("jaxtyping"):
        pytest.skip(
            "lrlhf.functional was imported by other tests first: run tests/functional alone"
        )


@pytest.mark.usefixtures("_checked")
def test_a_mask_that_is_not_bool_is_refused() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        masking.masked_mean(torch.ones(2, 3), torch.ones(2, 3))


@pytest.mark.usefixtures("_checked")
def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        bradley_terry_loss(torch.ones(2), torch.ones(2, 1))
