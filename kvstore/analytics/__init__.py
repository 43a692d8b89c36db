"""Traces, workloads and what they say about the pool: the same request stream drives a live pool, the
reference engines of the demo, and the offline simulation, so that their hit counts can be compared.
"""
