"""Generated from proto/meshnet/v1 by ``buf generate``; never edited by hand."""
