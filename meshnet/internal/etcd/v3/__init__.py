"""Generated from proto/meshnet/internal/etcd/v3; not edited by hand."""
