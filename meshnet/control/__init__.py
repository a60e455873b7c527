"""The control plane: one servicer, served as gRPC and as JSON."""
