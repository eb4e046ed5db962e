class DeepEPHTAll2AllManager:
    pass


class DeepEPLLAll2AllManager:
    pass
