"""Which threads spin while they wait: the user's setting, else ours, in time for torch."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from lrlhf.threads import spin_not_at_all

# as torch is about to be loaded, whose OpenMP reads the environment then and never again
SCRIPT = """
import os, sys
import lrlhf.__main__

def seen(name):
    assert "torch" not in sys.modules
    print({key: os.environ.get(key) for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")})
    sys.exit()

lrlhf.__main__.import_module = seen
lrlhf.__main__.main(["fit"])
"""


def environment(chosen: Mapping[str, str]) -> dict[str, str]:
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    return {key: value for key, value in os.environ.items() if key not in ours} | dict(chosen)


@pytest.mark.parametrize(
    ("chosen", "policy", "count"),
    [
        ({}, None, "10000"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "PASSIVE", None),
        ({"GOMP_SPINCOUNT": "7"}, None, "7"),
    ],
)
def test_a_command_has_threads_spin_briefly_unless_the_user_chose(
    chosen: dict[str, str], policy: str | None, count: str | None
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment(chosen),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{ {'OMP_WAIT_POLICY': policy, 'GOMP_SPINCOUNT': count} }\n"


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
