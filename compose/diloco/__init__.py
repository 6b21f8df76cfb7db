"""Workers that train alone and exchange their weights every few steps (DiLoCo)."""
