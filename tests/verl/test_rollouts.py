def test_the_engine(ray_cluster, compose, lines, run):
    import ray
    r = run(compose(*lines("Drafts")))
    print(ray.get(r.server.said.remote()))
