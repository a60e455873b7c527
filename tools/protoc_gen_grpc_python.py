"""A protoc plugin: the grpc_python generator that is linked into grpcio-tools.

grpcio-tools ships no stand-alone plugin binary, and buf needs one. This reads a
CodeGeneratorRequest on stdin, hands its descriptors to the bundled protoc, and writes
the generated files as a CodeGeneratorResponse on stdout.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.compiler import plugin_pb2
from grpc_tools import protoc


def generate(request: plugin_pb2.CodeGeneratorRequest) -> plugin_pb2.CodeGeneratorResponse:
    """Run the generator on the request's files."""
    response = plugin_pb2.CodeGeneratorResponse(
        supported_features=plugin_pb2.CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL
    )
    descriptors = descriptor_pb2.FileDescriptorSet(file=request.proto_file)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in.binpb"), Path(folder, "out")
        source.write_bytes(descriptors.SerializeToString())
        out.mkdir()
        options = f"{request.parameter}:" if request.parameter else ""
        status = protoc.main(
            [
                "protoc",
                f"--descriptor_set_in={source}",
                f"--grpc_python_out={options}{out}",
                *request.file_to_generate,
            ]
        )
        if status != 0:
            response.error = f"grpc_python generator failed with status {status}"
        for path in sorted(path for path in out.rglob("*") if path.is_file()):
            response.file.add(name=path.relative_to(out).as_posix(), content=path.read_text())
    return response


if __name__ == "__main__":
    incoming = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
    sys.stdout.buffer.write(generate(incoming).SerializeToString())
