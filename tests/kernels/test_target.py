"""What is asked of a device, where it can be asked without one."""

from types import SimpleNamespace

import pytest
import torch

from nybble.kernels.target import pci_address


@pytest.mark.parametrize(
    ("props", "address"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 0xC5, "pci_device_id": 0}, "0000:c5:00.0"),
        ({"pci_domain_id": 1, "pci_bus_id": 3, "pci_device_id": 31}, "0001:03:1f.0"),
        ({"pci_bus_id": 3}, ""),
    ],
    ids=["Strix Halo", "another domain", "a torch that does not say"],
)
def test_a_pci_address(monkeypatch, props, address):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**props))
    assert pci_address(torch.device("cuda", 0)) == address
    assert pci_address(torch.device("cpu")) == ""
