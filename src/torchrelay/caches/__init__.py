# SPDX-License-Identifier: Apache-2.0
"""The kinds of caches, a module each, and what torchrelay knows of a cache directory."""
