"""The process of one GPU: messages in, engine, messages out."""
