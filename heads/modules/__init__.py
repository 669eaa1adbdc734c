"""The parts of a head, torch alone: embeddings, adapters, aggregators, similarities and losses."""
