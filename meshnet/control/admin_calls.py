"""Calls of the services that operators set a mesh up with."""

from __future__ import annotations

from meshnet.control.service_calls import ServiceCalls
from meshnet.control.stubs import enrollment_stub, operator_stub, reference_stub
from meshnet.v1 import enrollment_service_pb2 as enroll_pb
from meshnet.v1 import operator_service_pb2 as operator_pb
from meshnet.v1 import reference_service_pb2 as reference_pb

__all__ = ["AdminCalls"]


class AdminCalls(ServiceCalls):
    """References, join tokens, members and operators."""

    async def put_reference(
        self, reference: reference_pb.Reference, *, replace: bool = False
    ) -> reference_pb.Reference:
        """Register what a model computes."""
        request = reference_pb.PutReferenceRequest(reference=reference, replace=replace)
        response: reference_pb.PutReferenceResponse = await self._call(
            reference_stub, "PutReference", request
        )
        return response.reference

    async def list_references(self) -> list[reference_pb.Reference]:
        """Give all references, page by page, without their parts."""
        request = reference_pb.ListReferencesRequest()
        return await self._all(reference_stub, "ListReferences", request, "references")

    async def delete_reference(self, model_digest: str) -> None:
        """Remove a reference."""
        request = reference_pb.DeleteReferenceRequest(name=f"references/{model_digest}")
        await self._call(reference_stub, "DeleteReference", request)

    async def create_join_token(
        self, wanted: enroll_pb.JoinToken
    ) -> enroll_pb.CreateJoinTokenResponse:
        """Create a join token; only this answer has its secret."""
        request = enroll_pb.CreateJoinTokenRequest(join_token=wanted)
        response: enroll_pb.CreateJoinTokenResponse = await self._call(
            enrollment_stub, "CreateJoinToken", request
        )
        return response

    async def list_join_tokens(self) -> list[enroll_pb.JoinToken]:
        """Give all join tokens, page by page."""
        request = enroll_pb.ListJoinTokensRequest()
        return await self._all(enrollment_stub, "ListJoinTokens", request, "join_tokens")

    async def delete_join_token(self, public: str) -> None:
        """Delete a join token by its public part."""
        request = enroll_pb.DeleteJoinTokenRequest(name=f"joinTokens/{public}")
        await self._call(enrollment_stub, "DeleteJoinToken", request)

    async def list_members(self) -> list[enroll_pb.Member]:
        """Give all who have joined, page by page."""
        request = enroll_pb.ListMembersRequest()
        return await self._all(enrollment_stub, "ListMembers", request, "members")

    async def delete_member(self, member: str) -> None:
        """Remove a member, ``ROLE.NAME``."""
        request = enroll_pb.DeleteMemberRequest(name=f"members/{member}")
        await self._call(enrollment_stub, "DeleteMember", request)

    async def create_operator(
        self, operator: operator_pb.Operator
    ) -> operator_pb.CreateOperatorResponse:
        """Create an operator; the answer has the token, which cannot be had again."""
        request = operator_pb.CreateOperatorRequest(operator=operator)
        response: operator_pb.CreateOperatorResponse = await self._call(
            operator_stub, "CreateOperator", request
        )
        return response

    async def list_operators(self) -> list[operator_pb.Operator]:
        """Give all operators, page by page."""
        request = operator_pb.ListOperatorsRequest()
        return await self._all(operator_stub, "ListOperators", request, "operators")

    async def revoke_operator(self, name: str) -> operator_pb.Operator:
        """Refuse an operator from now on."""
        request = operator_pb.RevokeOperatorRequest(name=f"operators/{name}")
        response: operator_pb.RevokeOperatorResponse = await self._call(
            operator_stub, "RevokeOperator", request
        )
        return response.operator
