"""Who a process or a person is to the mesh: a role and a name, as certificates state them.

Source: the SPIFFE ID specification, <https://spiffe.io/docs/latest/spiffe-specs/spiffe-id/>.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["CONTROL_DNS_NAME", "NAME", "Identity", "Role", "parse_identity"]

CONTROL_DNS_NAME: Final = "control.mesh"
"""DNS name in the certificate of every control plane, and in no other."""

NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
"""A name that an operator chooses for somebody."""

_URI: Final = re.compile(rf"spiffe://mesh/([a-z]+)/({NAME.pattern})")


class Role(Enum):
    """What somebody may do; the value stands in names and certificates."""

    CONTROL = "control"
    NODE = "node"
    GATEWAY = "gateway"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"

    @property
    def is_operator(self) -> bool:
        """Whether it is a role of people: each of read, operate, admin may what the last may."""
        return self in (Role.READ, Role.OPERATE, Role.ADMIN)


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody whom the mesh knows.

    Attributes:
        role: see there.
        name: of a node its id; otherwise what an operator chose: 1 to 63 of ``a-z0-9.-``,
            with a letter or digit at both ends.
    """

    role: Role
    name: str

    @property
    def uri(self) -> str:
        """The SPIFFE ID, ``spiffe://mesh/ROLE/NAME``."""
        return f"spiffe://mesh/{self.role.value}/{self.name}"


def parse_identity(uri: str) -> Identity:
    """Read ``spiffe://mesh/ROLE/NAME``.

    Raises:
        ValueError: it is something else, with what was expected.
    """
    found = _URI.fullmatch(uri)
    roles = {role.value: role for role in Role}
    if found is None or found[1] not in roles:
        raise ValueError(
            f"identity {uri[:100]!r}: expected spiffe://mesh/ROLE/NAME with a role of "
            f"{', '.join(roles)}"
        )
    return Identity(roles[found[1]], found[2])
