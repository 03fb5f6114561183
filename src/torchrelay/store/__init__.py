# SPDX-License-Identifier: Apache-2.0
"""What is done with a store: publish, fetch, check and look, over any backend, for any kind of cache."""
