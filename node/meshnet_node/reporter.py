"""What a node tells the control plane of its probes, and hears of them."""

from __future__ import annotations

import logging
import math
import time
from typing import Final

from meshnet.control.client import ControlClient
from meshnet.control.probe_messages import report_message
from meshnet.errors import Code, MeshError
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as nodes_pb2
from meshnet.v1 import reference_service_pb2 as references_pb2
from meshnet_node.app import Node
from meshnet_node.prober import Probed

__all__ = ["Reporter"]

_log = logging.getLogger(__name__)

_STALE_S: Final = 300.0
"""How old a probe may be to be told again; an older one is made anew."""

_AGAIN_S: Final = 60.0
"""After which a report is told though it says what the last one did."""

_State = nodes_pb2.Verification


class Reporter:
    """Sends what is new of each probe, all of it once a minute, and again where it is asked for.

    Args:
        node_id: of the node, for the log.
        model: that it serves, without ``models/``.
        node: that is probed.
        reference: of the model, where this node has it.
    """

    def __init__(
        self,
        node_id: NodeId,
        model: str,
        node: Node,
        reference: references_pb2.Reference | None,
    ) -> None:
        self._node_id = node_id
        self._model = model
        self._node = node
        self._reference = reference
        self._told: Probed | None = None
        self._told_text = b""
        self._told_s = -math.inf
        self._state = _State.STATE_UNSPECIFIED

    async def introduce(self, client: ControlClient) -> None:
        """Give the control plane the model's reference if it has none; begin anew with it.

        The first node that has one is believed. Where only operators may give references,
        it is left to them.
        """
        self._told = None
        self._told_s = -math.inf
        if self._reference is None:
            return
        try:
            await client.put_reference(self._reference)
        except MeshError as error:
            if error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                raise
            is_other = error.reason == "REFERENCE_EXISTS"
            level = logging.WARNING if is_other else logging.INFO
            _log.log(level, "node %s: its reference was not taken: %s", self._node_id, error)

    def pending(self) -> tuple[list[nodes_pb2.ProbeReport], Probed | None]:
        """Give what is to be told, and the probe that it is of, for `hear`."""
        latest = self._latest()
        if latest is None or latest is self._told:
            return [], None
        message = report_message(self._model, latest.report)
        is_news = message.SerializeToString(deterministic=True) != self._told_text
        if not is_news and time.monotonic() - self._told_s < _AGAIN_S:
            return [], None
        return [message], latest

    def hear(self, answer: nodes_pb2.HeartbeatResponse, told: Probed | None) -> bool:
        """Take in the answer to a heartbeat with what `pending` gave.

        Tells whether to beat again.
        """
        if told is not None:
            self._keep(told)
        self._heed(answer.verification, told)
        latest, prober = self._latest(), self._node.prober
        if not answer.probes_wanted or prober is None or told is not None or latest is None:
            return False
        if time.monotonic() - latest.at_s > _STALE_S:
            prober.wish()
            return False
        self._told, self._told_s = None, -math.inf
        return True

    def _keep(self, told: Probed) -> None:
        message = report_message(self._model, told.report)
        self._told, self._told_s = told, time.monotonic()
        self._told_text = message.SerializeToString(deterministic=True)

    def _heed(self, found: nodes_pb2.Verification, told: Probed | None) -> None:
        """Let the control plane's word count, for new sessions and for what is compared with."""
        prober = self._node.prober
        is_right = found.state == _State.STATE_VERIFIED
        if prober is not None and told is not None and told.report.problem and is_right:
            prober.trust(told)
        self._node.judge_numbers(found.message if found.state == _State.STATE_FAILED else "")
        self._say(found)

    def _latest(self) -> Probed | None:
        prober = self._node.prober
        return None if prober is None else prober.latest

    def _say(self, found: nodes_pb2.Verification) -> None:
        if found.state == self._state:
            return
        self._state = found.state
        if found.state == _State.STATE_FAILED:
            _log.error(
                "node %s is quarantined and gets no sessions: %s (%s)",
                self._node_id,
                found.message,
                found.reason,
            )
        elif found.state == _State.STATE_VERIFIED:
            _log.info("node %s: its numbers are those of its model", self._node_id)
        elif found.state == _State.STATE_PENDING and found.message:
            _log.warning("node %s gets no sessions: %s", self._node_id, found.message)
