"""Generated from proto/meshnet/internal/store/v1; not edited by hand."""
