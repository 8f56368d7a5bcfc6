import time

time.sleep(60)  # a rank that never connects
