"""Names and import paths of functions, and their annotations, which are checked in these tests."""

import jaxtyping
import pytest
import torch

from lrlhf.functional import bradley_terry_loss, masking
from lrlhf.functional.names import import_function, unknown_name


def test_the_error_lists_the_names_and_suggests_the_nearest() -> None:
    error = unknown_name("fruit", "aple", ["pear", "apple"])
    assert str(error) == (
        "unknown fruit 'aple', expected one of apple, pear; did you mean 'apple'?"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("relu", "unknown loss 'relu'"),
        ("no.such.function", "'no.such.function' cannot be imported"),
        ("torch.no_such_name", "'torch.no_such_name' cannot be imported"),
        ("torch..relu", "'torch..relu' cannot be imported"),
        ("math.pi", "'math.pi' is a float, not a function"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_function("loss", path, ["mse"])


def test_masks_that_are_not_bool_and_shapes_that_would_broadcast_are_refused() -> None:
    if not type(masking.__spec__.loader).__module__.startswith("jaxtyping"):
        pytest.skip("lrlhf.functional was imported by other tests: run tests/functional alone")
    with pytest.raises(jaxtyping.TypeCheckError):
        masking.masked_mean(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(jaxtyping.TypeCheckError):
        bradley_terry_loss(torch.ones(2), torch.ones(2, 1))
