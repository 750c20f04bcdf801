"""The cloud: one target model, one judge, many sessions, behind gRPC."""

import logging

log = logging.getLogger("skydraft.cloud")
