"""The generated gRPC modules, which carry no types, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from meshnet.v1 import (
    enrollment_service_pb2,
    enrollment_service_pb2_grpc,
    node_service_pb2,
    node_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
    reference_service_pb2,
    reference_service_pb2_grpc,
    route_service_pb2,
    route_service_pb2_grpc,
)

if TYPE_CHECKING:  # a client needs no servicers
    from meshnet.control.enrollment_service import EnrollmentService
    from meshnet.control.node_service import NodeService
    from meshnet.control.operator_service import OperatorService
    from meshnet.control.reference_service import ReferenceService
    from meshnet.control.route_service import RouteService

__all__ = [
    "SERVICES",
    "add_enrollment",
    "add_nodes",
    "add_operators",
    "add_references",
    "add_routes",
    "enrollment_stub",
    "node_stub",
    "operator_stub",
    "reference_stub",
    "route_stub",
]

SERVICES: Final = (
    node_service_pb2.DESCRIPTOR.services_by_name["NodeService"],
    route_service_pb2.DESCRIPTOR.services_by_name["RouteService"],
    enrollment_service_pb2.DESCRIPTOR.services_by_name["EnrollmentService"],
    operator_service_pb2.DESCRIPTOR.services_by_name["OperatorService"],
    reference_service_pb2.DESCRIPTOR.services_by_name["ReferenceService"],
)
"""Descriptors of the services that both faces serve."""


def add_nodes(servicer: NodeService, server: grpc.aio.Server) -> None:
    """Register a servicer."""
    node_service_pb2_grpc.add_NodeServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def add_routes(servicer: RouteService, server: grpc.aio.Server) -> None:
    """Register a servicer."""
    route_service_pb2_grpc.add_RouteServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def add_enrollment(servicer: EnrollmentService, server: grpc.aio.Server) -> None:
    """Register a servicer."""
    enrollment_service_pb2_grpc.add_EnrollmentServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def add_operators(servicer: OperatorService, server: grpc.aio.Server) -> None:
    """Register a servicer."""
    operator_service_pb2_grpc.add_OperatorServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def add_references(servicer: ReferenceService, server: grpc.aio.Server) -> None:
    """Register a servicer."""
    reference_service_pb2_grpc.add_ReferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def reference_stub(channel: grpc.aio.Channel) -> Any:
    """Give the calls of ReferenceService."""
    return reference_service_pb2_grpc.ReferenceServiceStub(channel)  # type: ignore[no-untyped-call]


def node_stub(channel: grpc.aio.Channel) -> Any:
    """Give the calls of NodeService."""
    return node_service_pb2_grpc.NodeServiceStub(channel)  # type: ignore[no-untyped-call]


def route_stub(channel: grpc.aio.Channel) -> Any:
    """Give the calls of RouteService."""
    return route_service_pb2_grpc.RouteServiceStub(channel)  # type: ignore[no-untyped-call]


def enrollment_stub(channel: grpc.aio.Channel) -> Any:
    """Give the calls of EnrollmentService."""
    return enrollment_service_pb2_grpc.EnrollmentServiceStub(channel)  # type: ignore[no-untyped-call]


def operator_stub(channel: grpc.aio.Channel) -> Any:
    """Give the calls of OperatorService."""
    return operator_service_pb2_grpc.OperatorServiceStub(channel)  # type: ignore[no-untyped-call]
