"""The most memory that was taken, also where something measures anew in between."""

import psutil
import pytest
import torch

from lrlhf.models.token_budget import begin_anew, peak_memory

GPU = torch.device("cuda", 5)


def test_without_a_gpu_it_is_the_largest_resident_set_of_the_process() -> None:
    device, process = torch.device("cpu"), psutil.Process()
    missing = peak_memory(device) - process.memory_info().rss
    held = torch.ones(max(0, missing) + (64 << 20), dtype=torch.uint8)
    resident = process.memory_info().rss
    # the kernel counts pages of several threads with a delay
    assert peak_memory(device) >= resident - (8 << 20)
    del held
    assert peak_memory(device) >= resident - (8 << 20)


def test_on_a_gpu_a_peak_outlives_what_measures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {GPU: 700}

    def reset(device: torch.device) -> None:
        taken[device] = 100

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", taken.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr("lrlhf.models.token_budget._BEFORE", {})
    assert peak_memory(GPU) == 700
    begin_anew(GPU)
    assert peak_memory(GPU) == 700
    taken[GPU] = 500
    begin_anew(GPU)
    assert peak_memory(GPU) == 700
    taken[GPU] = 900
    assert peak_memory(GPU) == 900
