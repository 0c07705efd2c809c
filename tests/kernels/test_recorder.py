"""Device events stand for GPU calls here: the recorder polls them and never waits."""

import pytest
import torch

from nybble.kernels.linear.recorder import GemmRecorder


class Event:
    """Reached when the test says so; `elapsed_time` in milliseconds, as torch's."""

    def __init__(self, enable_timing):
        self.reached = False
        self.at_ms = 0.0

    def record(self):
        Event.made.append(self)

    def query(self):
        return self.reached

    def elapsed_time(self, end):
        assert self.reached and end.reached, "waited for the device"
        return end.at_ms - self.at_ms


@pytest.fixture
def events(monkeypatch):
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event.made


def test_gpu_samples_appear_once_the_device_has_passed_them(events):
    recorder = GemmRecorder()
    for label, m in (("qkv", 1), ("o", 2)):
        recorder.stop(recorder.start(torch.device("cuda")), "triton", label, m)
    assert recorder.take_samples() == {}
    for event, at_ms in zip(events[:2], (1.0, 1.5), strict=True):
        event.reached, event.at_ms = True, at_ms
    assert recorder.take_samples() == {("triton", "decode"): (pytest.approx(0.5e-3),)}
    assert recorder.take_latest() == {("qkv", "triton"): (pytest.approx(0.5e-3), 1)}
    for event, at_ms in zip(events[2:], (2.0, 4.0), strict=True):
        event.reached, event.at_ms = True, at_ms
    assert recorder.take_samples() == {("triton", "decode"): (pytest.approx(2e-3),)}


def test_events_of_a_device_that_hangs_do_not_pile_up(events):
    recorder = GemmRecorder()
    for _ in range(5000):
        recorder.stop(recorder.start(torch.device("cuda")), "triton", "qkv", 1)
    assert len(recorder._pending) == 4096
