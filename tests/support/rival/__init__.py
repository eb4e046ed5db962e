"""DeepEP's own tests, fetched and run over the drop-in deep_ep: what tools/rival_tests rests on."""
