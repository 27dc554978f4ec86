"""What the Triton kernels of both operators share. Importing this needs no Triton; each module says what it needs."""
