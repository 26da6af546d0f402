"""Regions: pieces of a forward pass that run again in the backward, in the state that they found.

    api          the public calls           call, replay   one call; its replays
    entry        the state at entry         arguments      what it was called with
    log          old bytes of large state   watch          operations of a call that is learnt
    discover/    finds state                region         what is known of each region
    guard        digests                    ambient        modes
    frames       what runs on this thread   effects        what cannot be rewound

docs/concepts/state-safe-checkpoint.md tells how they work together.
"""
