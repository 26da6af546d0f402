"""Bytes by formula: optimizers, transformer layers, sharding, devices and their allocator. Pure; knows no framework."""
