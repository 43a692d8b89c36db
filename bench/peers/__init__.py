"""Drivers of `bench/peers.py`: one file a store, ours among them, and what they share.

A driver runs in the environment of its store, as a process of its own, and knows nothing of the others: `environments`
makes those environments, `drive` is the only module that they all import, `hosts` makes two hosts of one.
"""
