"""placeholder"""


def decompress(encoding, body, num_bytes):
    return body
