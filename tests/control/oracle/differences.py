"""Where this server and Envoy differ on purpose: the case, Envoy's status, and why we differ.

Envoy is asked with its strict options. A case that is not named here must agree, and one
that is named must differ: a new Envoy that changes its mind fails the test.
"""

from __future__ import annotations

DIFFERENCES: dict[str, tuple[int, str]] = {
    "T13 other method's verb": (404, "a known path with another method is 405 with Allow"),
    "M2 wrong method": (404, "a known path with another method is 405 with Allow"),
    "M5 method override, JSON": (404, "a known path with another method is 405 with Allow"),
    "M6 method override, form": (404, "a known path with another method is 405 with Allow"),
    "M3 HEAD on a GET route": (404, "RFC 9110: HEAD is served wherever GET is"),
    "M4 OPTIONS": (404, "RFC 9110: OPTIONS says what is allowed"),
    "T15 trailing slash": (200, "no template has it; http.proto matches segments exactly"),
    "T17 empty wildcard": (200, "http.proto: * matches one segment, and an empty one is none"),
    "T18 malformed escape in path": (200, "RFC 3986: % is followed by two digits"),
    "Q31 malformed escape in query": (200, "RFC 3986: % is followed by two digits"),
    "T19 literal encoded %73helves": (404, "RFC 3986: an escaped unreserved byte is that byte"),
    "Q29 encoded key": (400, "RFC 3986: an escaped unreserved byte is that byte"),
    "T21 invalid UTF-8 in path": (500, "the caller's fault, so 400 and no call"),
    "Q5 repeated message": (200, "http.proto: a query cannot carry repeated messages"),
    "Q8 singular twice": (200, "one of two values would be lost silently"),
    "B10 duplicate keys": (200, "one of two values would be lost silently"),
    "Q12 no '='": (200, "an empty text is no bool"),
    "Q13 bool '1'": (200, "ProtoJSON: true and false alone"),
    "Q27 query repeats path field": (200, "the path says what is asked for"),
    "B16 query under body field": (200, "http.proto: the query has what path and body lack"),
    "B4 body '*' + query": (200, "http.proto: with * there are no query parameters"),
    "B3 unknown body field": (200, "ProtoJSON: unknown fields are errors; a typing error is told"),
    "B9 PATCH without mask": (200, "AIP-134: the mask is what the body has"),
    "B12 text/plain body": (200, "what a form can send must not change anything"),
    "B14 body on GET": (200, "RFC 9110: content of a GET has no meaning"),
    "D2 grpc-timeout bad": (500, "the caller's fault, so 400 and no call"),
    "H2 bad binary metadata": (500, "the caller's fault, so 400 and no call"),
    "H1 metadata in": (200, "only Grpc-Metadata-* and Authorization become metadata"),
    "S1 stream": (200, "lines are {result}, so that an error can be told from a message"),
    "S3 error after first": (200, "Envoy cuts the answer; the last line is {error}"),
}
