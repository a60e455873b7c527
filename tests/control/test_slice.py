from __future__ import annotations


async def test_a_node_registers_beats_and_is_routed_to_on_both_faces(mesh):
    await mesh.join("a", (0, 5), port=7081)
    await mesh.join("b", (4, 8), port=7082)
    route = await mesh.client.select_route("models/acme/tiny")
    assert [hop.node for hop in route.hops] == ["nodes/a", "nodes/b"]
    status, body = await mesh.json("POST", "/v1/routes:select", json={"model": "models/acme/tiny"})
    assert status == 200
    assert body["routes"][0]["routeId"] == route.route_id
    assert body["routes"][0]["hops"][1]["endpoint"] == {"uri": "http://127.0.0.1:7082/forward"}
