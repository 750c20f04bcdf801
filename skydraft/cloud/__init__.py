"""The cloud: one target model that serves many sessions over gRPC."""

import logging

log = logging.getLogger("skydraft.cloud")
