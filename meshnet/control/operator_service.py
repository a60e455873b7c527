"""OperatorService: creating, listing and revoking operators."""

from __future__ import annotations

from typing import Final

from meshnet.control.enrollment_shape import ROLE_NUMBERS, ROLES
from meshnet.control.operators import Operator, Operators
from meshnet.control.paging import page_of
from meshnet.control.validate import check_required, invalid
from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, Role, parse_identity
from meshnet.v1 import enrollment_service_pb2 as enrollment_pb2
from meshnet.v1 import operator_service_pb2 as pb

__all__ = ["OperatorService"]

_ROLES: Final = {number: role for number, role in ROLES.items() if role.is_operator}


class OperatorService:
    """Servicer of meshnet.v1.OperatorService, for both faces.

    Args:
        operators: None on a control plane that is open, which has none.
    """

    def __init__(self, operators: Operators | None) -> None:
        self._operators = operators

    async def CreateOperator(  # noqa: N802 - the schema's name
        self, request: pb.CreateOperatorRequest, _context: object
    ) -> pb.CreateOperatorResponse:
        """Create an operator."""
        check_required(request)
        wanted = request.operator
        role = _ROLES.get(wanted.role)
        if role is None:
            expected = ", ".join(map(enrollment_pb2.Role.Name, _ROLES))
            raise invalid("operator.role", f"{wanted.role}: expected one of {expected}")
        name = _name(wanted.name, "operator.name")
        operator, token = await self._known().create(Identity(role, name))
        return pb.CreateOperatorResponse(operator=_message(operator), token=token)

    async def ListOperators(  # noqa: N802
        self, request: pb.ListOperatorsRequest, _context: object
    ) -> pb.ListOperatorsResponse:
        """Give a page of the operators."""
        keyed = [(found.name, _message(found)) for found in await self._known().list()]
        page, token = page_of(request, keyed)
        return pb.ListOperatorsResponse(operators=page, next_page_token=token)

    async def RevokeOperator(  # noqa: N802
        self, request: pb.RevokeOperatorRequest, _context: object
    ) -> pb.RevokeOperatorResponse:
        """Refuse an operator from now on."""
        check_required(request)
        revoked = await self._known().revoke(_name(request.name, "name"))
        return pb.RevokeOperatorResponse(operator=_message(revoked))

    def _known(self) -> Operators:
        if self._operators is None:
            raise MeshError(
                Code.FAILED_PRECONDITION,
                "this control plane is open to everybody and has no operators; one that knows "
                "its callers is started with: meshnet control --state DIR",
                reason="CONTROL_IS_OPEN",
            )
        return self._operators


def _name(text: str, field: str) -> str:
    """Read the resource name ``operators/{name}``.

    Raises:
        MeshError: INVALID_ARGUMENT, not such a name.
    """
    prefix, _, name = text.partition("/")
    try:
        if prefix != "operators":
            raise ValueError
        return parse_identity(f"spiffe://mesh/{Role.READ.value}/{name}").name
    except ValueError:
        raise invalid(
            field,
            f"{text[:100]!r}: expected operators/NAME of 1 to 63 of a-z0-9.-, with a letter or "
            "digit at both ends",
        ) from None


def _message(operator: Operator) -> pb.Operator:
    message = pb.Operator(
        name=f"operators/{operator.name}",
        role=ROLE_NUMBERS[operator.role],
        revoked=operator.is_revoked,
    )
    message.create_time.FromMilliseconds(int(operator.created_s * 1000))
    return message
