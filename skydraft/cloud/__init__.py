"""The cloud: one target model, one judge, many sessions, behind gRPC."""
