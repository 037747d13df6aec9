"""Hooks in other projects, so that they rotate and quantize with hadagen. One module a host.

HADAGEN_INTEGRATIONS switches them: `none` for no hook, or the names of the hosts that get them, such as
`vllm,transformers`. By default all hosts do. Where a host has changed, its module warns once and the host computes by
itself.
"""
