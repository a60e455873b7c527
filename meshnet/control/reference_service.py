"""ReferenceService: what models are to compute."""

from __future__ import annotations

from meshnet.control.paging import page_of
from meshnet.control.probe_messages import reference_of
from meshnet.control.references import References
from meshnet.control.validate import check_required, invalid
from meshnet.errors import Code, MeshError
from meshnet.v1 import reference_service_pb2 as pb

__all__ = ["ReferenceService"]


class ReferenceService:
    """Servicer of meshnet.v1.ReferenceService, for both faces.

    Every method raises MeshError alone; `rpc` turns it into the call's status.
    """

    def __init__(self, references: References) -> None:
        self._references = references

    async def PutReference(  # noqa: N802 - the schema's name
        self, request: pb.PutReferenceRequest, _context: object
    ) -> pb.PutReferenceResponse:
        """Keep a reference."""
        reference_of(request.reference)
        kept = await self._references.put(request.reference, replace=request.replace)
        return pb.PutReferenceResponse(reference=_without_parts(kept))

    async def ListReferences(  # noqa: N802
        self, request: pb.ListReferencesRequest, _context: object
    ) -> pb.ListReferencesResponse:
        """Give a page of them."""
        found = [
            (f"{message.model}\n{message.model_digest}", _without_parts(message))
            for message in await self._references.messages()
        ]
        page, token = page_of(request, sorted(found, key=lambda item: item[0]))
        return pb.ListReferencesResponse(references=page, next_page_token=token)

    async def DeleteReference(  # noqa: N802
        self, request: pb.DeleteReferenceRequest, _context: object
    ) -> pb.DeleteReferenceResponse:
        """Forget one."""
        check_required(request)
        prefix, _, digest = request.name.partition("/")
        if prefix != "references" or not digest.isalnum():
            raise invalid("name", f"{request.name[:200]!r}: expected references/DIGEST")
        if not await self._references.delete(digest):
            raise MeshError(
                Code.NOT_FOUND,
                f"no reference of model digest {digest[:64]!r}",
                field="name",
                reason="REFERENCE_UNKNOWN",
            )
        return pb.DeleteReferenceResponse()


def _without_parts(message: pb.Reference) -> pb.Reference:
    short = pb.Reference()
    short.CopyFrom(message)
    for variant in short.variants:
        variant.ClearField("parts")
    return short
