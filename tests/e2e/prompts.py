"""Five prompts, the last of more than 512 tokens."""

_LONG = """\
A river begins as rain. Some of the rain sinks into the ground, some runs over it, and what
runs over it looks for the lowest way. Small streams join, and where two streams meet the
water of both goes on in one bed. A bed is never finished: the water takes sand from the
outside of each bend, where it runs fast, and leaves sand on the inside, where it runs slowly,
so that every bend grows until the river cuts through its neck and leaves a lake behind that
is shaped like a new moon. People who live beside a river learn its habits. They build on
the high bank, plant on the low one, and keep their boats where the water is slack. In spring
the snow of the mountains melts and the river rises; in summer it falls and shows its stones.
A mill needs a fall of water and a steady flow, so millers built weirs and ponds, and towns
grew around the mills. When engines came, the mills were left, but the towns stayed.
"""

PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea and the people who sail on it.",
    "Explain in simple words why the sky is blue during the day and red in the evening.",
    "List five animals that live in cold places, with one sentence about each of them.",
    "Read this text and write what it says about towns.\n\n" + _LONG * 3,
]
