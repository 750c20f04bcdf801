"""The cloud: one target model, one worker, many sessions, behind gRPC."""
