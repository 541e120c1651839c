"""What the tests share: models, comparing with plain autograd, clocks, copies that end late, documents that run."""
