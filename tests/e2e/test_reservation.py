"""A request for which no cache is left, as OpenAI's client sees it."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.sessions import LAYERS, figures, mesh


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_node_is_a_429_and_nothing_is_held_or_computed(smollm2, stream):
    options = {name: ("--cache-tokens", "20") if name == "last" else () for name in LAYERS}
    with mesh(smollm2, node_options=options) as made:
        names = ("meshnet_tokens_total", "meshnet_sessions", "meshnet_cache_tokens_reserved")
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as caught:
                made.ask(stream=stream)
            assert caught.value.status_code == 429
            assert int(caught.value.response.headers["Retry-After"]) >= 1
            assert caught.value.code == "cache_full"
            for node in made.nodes.values():
                assert [figures(node.ready["address"])[name] for name in names] == [0.0, 0.0, 0.0]
