from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('django_rmq', '0005_control_workers'),
    ]

    operations = [
        migrations.AlterModelOptions(
            name='topic',
            options={'base_manager_name': 'objects', 'default_permissions': (), 'managed': False, 'permissions': [('view_topic', 'Can see topics, depths, consumers and messages without their content'), ('view_bodies', 'Can read bodies, keys and errors of messages'), ('send_messages', 'Can send messages'), ('consume_messages', 'Can consume messages over REST: take them with their content, and settle them'), ('replay_messages', 'Can replay dead messages'), ('edit_messages', 'Can edit messages before a replay, and reschedule them'), ('delete_messages', 'Can delete messages, and put them into Dead'), ('pause_topic', 'Can pause and resume topics'), ('purge_topic', 'Can purge topics'), ('control_workers', 'Can quiet, resume and stop workers'), ('view_stack', 'Can see where the code of running listeners is')], 'verbose_name': 'topic', 'verbose_name_plural': 'topics'},
        ),
    ]
