import pytest

from slime_hpc.errors import ClusterError
from slime_hpc.supervisor.address import interface_of, own_address


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(own_address("127.0.0.1")) == "lo"
    with pytest.raises(ClusterError, match=r"no network interface with address 192\.0\.2\.1"):
        interface_of("192.0.2.1")
