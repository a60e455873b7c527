"""meshnet: what nodes, gateways and the control plane share."""

__version__ = "0.1.0"
