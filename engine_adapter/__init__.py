"""Where serving engines meet the pool. Uses only the public names of `kvstore`.

An adapter is a `kvstore.client` destination and source over the engine's own pages (`copy.PagedKv`) and a
`session.PoolSession`, the one place where errors of the pool become misses. `model` and `reference` are a small
real engine to try the pool with.
"""
