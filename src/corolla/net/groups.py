"""Which network an address belongs to: the unit in which one attacker is counted.

Peer ids cost nothing, addresses cost something: an IPv4 address is one of a /24, an IPv6 address of a /48, which is
what a customer of a provider usually gets.
"""

import ipaddress
from typing import Final, NewType

AddressGroup = NewType("AddressGroup", str)
"""`192.0.2.0/24` or `2001:db8:7::/48`."""

_IPV4_BITS: Final = 24
_IPV6_BITS: Final = 48


def group_of(address: str | None) -> AddressGroup | None:
    """The group of a numeric address; None for None and for what is no address."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    bits = _IPV4_BITS if parsed.version == 4 else _IPV6_BITS
    return AddressGroup(str(ipaddress.ip_network((parsed.packed, bits), strict=False)))
