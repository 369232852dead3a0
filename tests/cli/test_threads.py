"""Which threads spin while they wait: the user's setting, else ours, in time for torch."""

import os

import pytest

import lrlhf.__main__
from lrlhf.threads import spin_not_at_all


@pytest.mark.parametrize(
    ("policy", "count", "expected"),
    [(None, None, "10000"), ("PASSIVE", None, None), (None, "7", "7")],
)
def test_a_command_has_threads_spin_briefly_unless_the_user_chose(
    policy: str | None, count: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OMP_WAIT_POLICY", policy), ("GOMP_SPINCOUNT", count)):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
        if value is not None:
            monkeypatch.setenv(name, value)

    def importing(name: str) -> None:
        # torch is loaded next, whose OpenMP reads the environment then and never again
        assert name == "lrlhf.cli"
        assert os.environ.get("OMP_WAIT_POLICY") == policy
        assert os.environ.get("GOMP_SPINCOUNT") == expected
        raise SystemExit(7)

    monkeypatch.setattr(lrlhf.__main__, "import_module", importing)
    with pytest.raises(SystemExit, match="7"):
        lrlhf.__main__.main(["fit"])


def test_a_server_beside_the_trainer_sleeps_unless_the_user_chose() -> None:
    # libgomp takes the count where both are set
    for given, expected in (
        ({"GOMP_SPINCOUNT": "10000"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": "PASSIVE"}),
    ):
        of_server = dict(given)
        spin_not_at_all(of_server)
        assert of_server == expected
