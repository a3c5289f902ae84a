"""Operations on whole topics: the definition, the slot count, and what Redis must store for them."""
